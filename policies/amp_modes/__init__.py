"""AMP modes: torch's, Apex's and the naive one."""

from jmp_train.policies.amp_modes.batch_norms import batch_norm_paths as batch_norm_paths
from jmp_train.policies.amp_modes.config import amp_from_config as amp_from_config
from jmp_train.policies.amp_modes.mode import Amp as Amp
from jmp_train.policies.amp_modes.mode import amp_mode as amp_mode
from jmp_train.policies.amp_modes.mode_options import AmpType as AmpType
from jmp_train.policies.amp_modes.mode_options import ApexOptions as ApexOptions
