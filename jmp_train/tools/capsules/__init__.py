"""Capsules: files from which the bad gradients of a skipped step are rebuilt bitwise."""

from jmp_train.tools.capsules.loading import capsule_step as capsule_step
from jmp_train.tools.capsules.loading import load_capsule as load_capsule
from jmp_train.tools.capsules.recorder import SkipRecorder as SkipRecorder
