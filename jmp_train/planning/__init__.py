"""Memory and time that a training step would need on absent GPUs and TPUs."""

from jmp_train.tools.planning import Allowances as Allowances
from jmp_train.tools.planning import Cut as Cut
from jmp_train.tools.planning import LargestBatch as LargestBatch
from jmp_train.tools.planning import Machine as Machine
from jmp_train.tools.planning import Placement as Placement
from jmp_train.tools.planning import Plan as Plan
from jmp_train.tools.planning import PlanRow as PlanRow
from jmp_train.tools.planning import PlanSearch as PlanSearch
from jmp_train.tools.planning import Workload as Workload
from jmp_train.tools.planning import plan as plan
