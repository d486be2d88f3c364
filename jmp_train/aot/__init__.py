"""Ahead-of-time (AOT) compilation for a target GPU."""

from jmp_train.aot.buffers import Argument as Argument
from jmp_train.aot.buffers import Buffer as Buffer
from jmp_train.aot.buffers import buffers_at_peak as buffers_at_peak
from jmp_train.aot.compilation import CompiledForGPU as CompiledForGPU
from jmp_train.aot.compilation import compile_for_gpu as compile_for_gpu
from jmp_train.aot.compilation import compile_here as compile_here
from jmp_train.aot.compilation import target_mesh as target_mesh
from jmp_train.aot.compiler_packages import INSTALL as INSTALL
from jmp_train.aot.compiler_packages import PluginError as PluginError
from jmp_train.aot.compiler_packages import install_compiler as install_compiler
from jmp_train.aot.costs import Costs as Costs
from jmp_train.aot.costs import program_costs as program_costs
from jmp_train.aot.exported import ExportedProgram as ExportedProgram
from jmp_train.aot.exported import ExportError as ExportError
from jmp_train.aot.exported import compile_program as compile_program
from jmp_train.aot.exported import export_program as export_program
from jmp_train.aot.gpus import GPU as GPU
from jmp_train.aot.gpus import GPUS as GPUS
from jmp_train.aot.gpus import read_gpus as read_gpus
from jmp_train.aot.hlo import read_hlo as read_hlo
from jmp_train.aot.measuring import Devices as Devices
from jmp_train.aot.measuring import Measured as Measured
from jmp_train.aot.measuring import devices_here as devices_here
from jmp_train.aot.measuring import measure_program as measure_program
from jmp_train.aot.shapes import is_shape as is_shape
from jmp_train.aot.shapes import shapes_of as shapes_of
