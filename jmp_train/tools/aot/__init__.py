"""Ahead-of-time (AOT) compilation for absent GPUs and TPUs."""

from jmp_train.tools.aot.buffers import Argument as Argument
from jmp_train.tools.aot.buffers import Buffer as Buffer
from jmp_train.tools.aot.buffers import buffers_at_peak as buffers_at_peak
from jmp_train.tools.aot.compiling import INSTALL as INSTALL
from jmp_train.tools.aot.compiling import INSTALL_TPU as INSTALL_TPU
from jmp_train.tools.aot.compiling import PluginError as PluginError
from jmp_train.tools.aot.compiling import install_compiler as install_compiler
from jmp_train.tools.aot.compiling import install_tpu_compiler as install_tpu_compiler
from jmp_train.tools.aot.costs import Costs as Costs
from jmp_train.tools.aot.costs import program_costs as program_costs
from jmp_train.tools.aot.exported import CompiledProgram as CompiledProgram
from jmp_train.tools.aot.exported import ExportedProgram as ExportedProgram
from jmp_train.tools.aot.exported import ExportError as ExportError
from jmp_train.tools.aot.exported import compile_program as compile_program
from jmp_train.tools.aot.exported import export_program as export_program
from jmp_train.tools.aot.exported import is_shape as is_shape
from jmp_train.tools.aot.exported import shapes_of as shapes_of
from jmp_train.tools.aot.gpus import GPU as GPU
from jmp_train.tools.aot.gpus import GPUS as GPUS
from jmp_train.tools.aot.gpus import read_gpus as read_gpus
from jmp_train.tools.aot.hlo import read_hlo as read_hlo
from jmp_train.tools.aot.networks import Device as Device
from jmp_train.tools.aot.networks import Network as Network
from jmp_train.tools.aot.tpus import TPU as TPU
from jmp_train.tools.aot.tpus import TPUS as TPUS
from jmp_train.tools.aot.tpus import tpu_slice as tpu_slice
