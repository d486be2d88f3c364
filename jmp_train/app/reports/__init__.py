"""Output of runs: progress, tables, charts, pages and files."""

from jmp_train.app.reports.display import LineDisplay as LineDisplay
from jmp_train.app.reports.display import compilations_shown as compilations_shown
from jmp_train.app.reports.display import display_on as display_on
from jmp_train.app.reports.display import print_tables as print_tables
from jmp_train.app.reports.display import print_text as print_text
from jmp_train.app.reports.display import showing as showing
from jmp_train.app.reports.display import trials_shown as trials_shown
from jmp_train.app.reports.page import explanations as explanations
from jmp_train.app.reports.page import json_line as json_line
from jmp_train.app.reports.page import report as report
from jmp_train.app.reports.page import write_files as write_files
from jmp_train.app.reports.page import write_report as write_report
