"""Traced programs: the programs that equations hold, and one evaluator of them for many readings."""

from jmp_train.policies.programs.in_jax import IN_JAX as IN_JAX
from jmp_train.policies.programs.in_jax import as_jax_array as as_jax_array
from jmp_train.policies.programs.in_jax import on_arrays as on_arrays
from jmp_train.policies.programs.loops import ABSTRACTLY as ABSTRACTLY
from jmp_train.policies.programs.loops import IN_PYTHON as IN_PYTHON
from jmp_train.policies.programs.loops import INLINED as INLINED
from jmp_train.policies.programs.loops import Scan as Scan
from jmp_train.policies.programs.loops import While as While
from jmp_train.policies.programs.reading import RUN_ONCE as RUN_ONCE
from jmp_train.policies.programs.reading import Enter as Enter
from jmp_train.policies.programs.reading import Place as Place
from jmp_train.policies.programs.reading import Reading as Reading
from jmp_train.policies.programs.reading import bodies_of as bodies_of
from jmp_train.policies.programs.reading import branches_of as branches_of
from jmp_train.policies.programs.reading import join as join
from jmp_train.policies.programs.reading import manual_axes as manual_axes
from jmp_train.policies.programs.reading import on_this_platform as on_this_platform
from jmp_train.policies.programs.reading import opened as opened
from jmp_train.policies.programs.reading import programs_in as programs_in
from jmp_train.policies.programs.reading import repeats_of as repeats_of
from jmp_train.policies.programs.reading import walk as walk
