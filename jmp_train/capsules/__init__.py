"""Capsules: files from which a skipped step's bad gradients are rebuilt, bit for bit."""

from jmp_train.capsules.capsule_files import capsule_step as capsule_step
from jmp_train.capsules.loading import load_capsule as load_capsule
from jmp_train.capsules.recorder import SkipRecorder as SkipRecorder
