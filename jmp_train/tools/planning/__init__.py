"""Memory and time that a training step would need on absent GPUs and TPUs."""

from jmp_train.tools.planning.batches import Batches as Batches
from jmp_train.tools.planning.batches import LargestBatch as LargestBatch
from jmp_train.tools.planning.placements import Allowances as Allowances
from jmp_train.tools.planning.placements import Machine as Machine
from jmp_train.tools.planning.placements import Placement as Placement
from jmp_train.tools.planning.placements import PlanSearch as PlanSearch
from jmp_train.tools.planning.plan_report import Plan as Plan
from jmp_train.tools.planning.plan_rows import PlanRow as PlanRow
from jmp_train.tools.planning.planner import plan as plan
from jmp_train.tools.planning.search import Cut as Cut
from jmp_train.tools.planning.workloads import Workload as Workload
