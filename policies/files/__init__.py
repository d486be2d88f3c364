"""Atomic writes, and the folder for caches."""

from jmp_train.policies.files.atomic_files import cache_folder as cache_folder
from jmp_train.policies.files.atomic_files import sync as sync
from jmp_train.policies.files.atomic_files import write_atomically as write_atomically
