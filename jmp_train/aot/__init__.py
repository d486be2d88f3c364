"""Ahead-of-time (AOT) compilation for a target GPU."""

from jmp_train.aot.compilation import CompiledForGPU as CompiledForGPU
from jmp_train.aot.compilation import compile_for_gpu as compile_for_gpu
from jmp_train.aot.gpus import GPU as GPU
from jmp_train.aot.gpus import GPUS as GPUS
from jmp_train.aot.gpus import read_gpus as read_gpus
