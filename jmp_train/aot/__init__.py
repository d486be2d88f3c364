"""Ahead-of-time (AOT) compilation for absent GPUs and TPUs."""

from jmp_train.tools.aot import GPU as GPU
from jmp_train.tools.aot import GPUS as GPUS
from jmp_train.tools.aot import INSTALL as INSTALL
from jmp_train.tools.aot import INSTALL_TPU as INSTALL_TPU
from jmp_train.tools.aot import TPU as TPU
from jmp_train.tools.aot import TPUS as TPUS
from jmp_train.tools.aot import Argument as Argument
from jmp_train.tools.aot import Buffer as Buffer
from jmp_train.tools.aot import CompiledProgram as CompiledProgram
from jmp_train.tools.aot import Costs as Costs
from jmp_train.tools.aot import ExportedProgram as ExportedProgram
from jmp_train.tools.aot import ExportError as ExportError
from jmp_train.tools.aot import PluginError as PluginError
from jmp_train.tools.aot import buffers_at_peak as buffers_at_peak
from jmp_train.tools.aot import compile_program as compile_program
from jmp_train.tools.aot import export_program as export_program
from jmp_train.tools.aot import install_compiler as install_compiler
from jmp_train.tools.aot import install_tpu_compiler as install_tpu_compiler
from jmp_train.tools.aot import is_shape as is_shape
from jmp_train.tools.aot import program_costs as program_costs
from jmp_train.tools.aot import read_gpus as read_gpus
from jmp_train.tools.aot import read_hlo as read_hlo
from jmp_train.tools.aot import shapes_of as shapes_of
from jmp_train.tools.aot import tpu_slice as tpu_slice
