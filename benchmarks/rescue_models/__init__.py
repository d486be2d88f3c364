"""Small models that train in float32, and do not under autocast to float16 by torch's table.

Each is a function of a seed. A line of theirs that ends in `# guilty` computes what float16 cannot hold; with these in
float32 they train as in float32, and all else may stay in half precision.
"""

from rescue_models import equinox_models, haiku_models, linen_models, nnx_models, plain_models
from rescue_models.model import Batch as Batch
from rescue_models.model import Model as Model
from rescue_models.model import Outcome as Outcome
from rescue_models.model import moments as moments
from rescue_models.model import train as train

MODELS = linen_models.MODELS + nnx_models.MODELS + equinox_models.MODELS + haiku_models.MODELS + plain_models.MODELS
