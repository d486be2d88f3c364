"""Small models that train in float32, and do not under autocast to float16 by torch's table.

Each is a function of a seed. Lines that end in `# guilty` compute values that float16 cannot hold. With these in
float32, the models train as in float32, and everything else may stay in half precision.
"""

from rescue_models import equinox_models, haiku_models, linen_models, nnx_models, plain_models
from rescue_models.model import Batch as Batch
from rescue_models.model import Model as Model
from rescue_models.model import Outcome as Outcome
from rescue_models.model import moments as moments
from rescue_models.model import train as train

MODELS = linen_models.MODELS + nnx_models.MODELS + equinox_models.MODELS + haiku_models.MODELS + plain_models.MODELS
