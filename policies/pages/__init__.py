"""HTML pages that need no scripts and no network, light or dark as their surroundings are; pictures, tables of text."""

from jmp_train.policies.pages import svg as svg
from jmp_train.policies.pages.html_document import code_block as code_block
from jmp_train.policies.pages.html_document import document as document
from jmp_train.policies.pages.text_tables import aligned as aligned
