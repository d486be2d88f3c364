"""HTML pages that need no scripts and no network, light or dark as their surroundings are."""

from jmp_train.policies.pages.html_document import code_block as code_block
from jmp_train.policies.pages.html_document import document as document
