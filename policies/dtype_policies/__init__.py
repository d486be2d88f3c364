"""Policies: the dtypes of a function's parameters, computation, output and reductions."""

from jmp_train.policies.dtype_policies.collapsed_values import check_narrowed as check_narrowed
from jmp_train.policies.dtype_policies.collapsed_values import lost_in_cast as lost_in_cast
from jmp_train.policies.dtype_policies.collapsed_values import warn_of_collapse as warn_of_collapse
from jmp_train.policies.dtype_policies.float32_sums import with_float32_sums as with_float32_sums
from jmp_train.policies.dtype_policies.half_products import FirstTrace as FirstTrace
from jmp_train.policies.dtype_policies.half_products import mixed_dtypes_explained as mixed_dtypes_explained
from jmp_train.policies.dtype_policies.policy import Policy as Policy
from jmp_train.policies.dtype_policies.policy import named_policy as named_policy
from jmp_train.policies.dtype_policies.policy_schedule import PolicyPhase as PolicyPhase
from jmp_train.policies.dtype_policies.policy_schedule import check_shares as check_shares
from jmp_train.policies.dtype_policies.policy_schedule import first_steps as first_steps
from jmp_train.policies.dtype_policies.policy_trace import cast_arguments as cast_arguments
from jmp_train.policies.dtype_policies.policy_trace import traced_operations as traced_operations
