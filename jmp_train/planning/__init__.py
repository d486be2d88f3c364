"""Memory and time that a training step would need on absent GPUs and TPUs."""

from jmp_train.planning.allowances import Allowances as Allowances
from jmp_train.planning.batches import Batches as Batches
from jmp_train.planning.batches import LargestBatch as LargestBatch
from jmp_train.planning.planner import plan as plan
from jmp_train.planning.remedies import Remedy as Remedy
from jmp_train.planning.report import Plan as Plan
from jmp_train.planning.rows import PlanRow as PlanRow
from jmp_train.planning.search import Cut as Cut
from jmp_train.planning.variants import Placement as Placement
