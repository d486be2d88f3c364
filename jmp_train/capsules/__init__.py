"""Files from which the bad gradients of a skipped step are rebuilt bitwise."""

from jmp_train.tools.capsules import SkipRecorder as SkipRecorder
from jmp_train.tools.capsules import capsule_step as capsule_step
from jmp_train.tools.capsules import load_capsule as load_capsule
