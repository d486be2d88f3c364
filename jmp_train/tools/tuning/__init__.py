"""Tuning: finds by trials which operations of a function or a training step must stay in float32."""

from jmp_train.tools.tuning.tolerance import Criterion as Criterion
from jmp_train.tools.tuning.tolerance import Errors as Errors
from jmp_train.tools.tuning.tolerance import Outcome as Outcome
from jmp_train.tools.tuning.tolerance import Tolerance as Tolerance
from jmp_train.tools.tuning.tuned_rules import Float32Entry as Float32Entry
from jmp_train.tools.tuning.tuned_rules import TunedProduct as TunedProduct
from jmp_train.tools.tuning.tuned_rules import TunedRules as TunedRules
from jmp_train.tools.tuning.tuned_rules import Verification as Verification
from jmp_train.tools.tuning.tuner import tune as tune
