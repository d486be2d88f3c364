"""What a run shows and leaves behind: progress, tables, plots, pages."""

from jmp_train.reports.comparison import explain_failure as explain_failure
from jmp_train.reports.comparison import explanations as explanations
from jmp_train.reports.comparison import note_outputs as note_outputs
from jmp_train.reports.comparison import note_phases as note_phases
from jmp_train.reports.comparison import note_rules as note_rules
from jmp_train.reports.diagnosis import diagnosis_json as diagnosis_json
from jmp_train.reports.diagnosis import write_diagnosis as write_diagnosis
from jmp_train.reports.display import Display as Display
from jmp_train.reports.display import display_on as display_on
from jmp_train.reports.planning import compilations_shown as compilations_shown
from jmp_train.reports.planning import plan_json as plan_json
from jmp_train.reports.planning import write_plan as write_plan
from jmp_train.reports.tables import print_speed_table as print_speed_table
from jmp_train.reports.tables import print_table as print_table
from jmp_train.reports.tables import report as report
from jmp_train.reports.tables import write_report as write_report
from jmp_train.reports.tuning import trials_shown as trials_shown
from jmp_train.reports.tuning import tuning_json as tuning_json
from jmp_train.reports.tuning import write_tuning as write_tuning
