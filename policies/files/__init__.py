"""Reading foreign files, atomic writes, and the folder for caches."""

from jmp_train.policies.files.plain_files import DamagedError as DamagedError
from jmp_train.policies.files.plain_files import aligned as aligned
from jmp_train.policies.files.plain_files import cache_folder as cache_folder
from jmp_train.policies.files.plain_files import damage_named as damage_named
from jmp_train.policies.files.plain_files import escaped as escaped
from jmp_train.policies.files.plain_files import faults_named as faults_named
from jmp_train.policies.files.plain_files import open_plain as open_plain
from jmp_train.policies.files.plain_files import parse_json as parse_json
from jmp_train.policies.files.plain_files import printable as printable
from jmp_train.policies.files.plain_files import read_plain as read_plain
from jmp_train.policies.files.plain_files import read_toml as read_toml
from jmp_train.policies.files.plain_files import sync as sync
from jmp_train.policies.files.plain_files import write_atomically as write_atomically
from jmp_train.policies.files.safetensors_files import DTYPES as DTYPES
from jmp_train.policies.files.safetensors_files import MOST_AXES as MOST_AXES
from jmp_train.policies.files.safetensors_files import SafetensorsFile as SafetensorsFile
from jmp_train.policies.files.safetensors_files import write_safetensors as write_safetensors
