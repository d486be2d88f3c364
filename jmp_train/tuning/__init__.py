"""Which operations of a function or a training step must stay in float32, found by trials."""

from jmp_train.tools.tuning import Errors as Errors
from jmp_train.tools.tuning import Float32Entry as Float32Entry
from jmp_train.tools.tuning import Outcome as Outcome
from jmp_train.tools.tuning import Tolerance as Tolerance
from jmp_train.tools.tuning import TunedProduct as TunedProduct
from jmp_train.tools.tuning import TunedRules as TunedRules
from jmp_train.tools.tuning import Verification as Verification
from jmp_train.tools.tuning import tune as tune
