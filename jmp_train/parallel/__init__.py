"""One step on many devices: data parallelism, shardings, pipelines."""

from jmp_train.parallel.parallel_steps import data_parallel as data_parallel
from jmp_train.parallel.parallel_steps import pmap_step as pmap_step
from jmp_train.parallel.parallel_steps import sharded_step as sharded_step
from jmp_train.parallel.pipelining import Stages as Stages
from jmp_train.parallel.pipelining import pipeline as pipeline
from jmp_train.parallel.shardings import fsdp_shardings as fsdp_shardings
from jmp_train.parallel.shardings import specs_by_path as specs_by_path
from jmp_train.parallel.shardings import state_shardings as state_shardings
from jmp_train.parallel.shardings import zero1_shardings as zero1_shardings
