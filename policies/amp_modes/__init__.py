"""AMP modes: torch's, Apex's and the naive one."""

from jmp_train.policies.amp_modes.mode_options import ApexOptions as ApexOptions
