"""Message passing under DGL's names, and sums over segments."""

from jmp_train.graphs.messages.frames import checked_ids as checked_ids
from jmp_train.graphs.messages.frames import frame_of as frame_of
from jmp_train.graphs.messages.frames import some_edges as some_edges
from jmp_train.graphs.messages.message_passing import apply_edges as apply_edges
from jmp_train.graphs.messages.message_passing import apply_nodes as apply_nodes
from jmp_train.graphs.messages.message_passing import update_all as update_all
from jmp_train.graphs.messages.multi_update import multi_update_all as multi_update_all
from jmp_train.graphs.messages.partial_updates import prop_edges as prop_edges
from jmp_train.graphs.messages.partial_updates import prop_nodes as prop_nodes
from jmp_train.graphs.messages.partial_updates import pull as pull
from jmp_train.graphs.messages.partial_updates import push as push
from jmp_train.graphs.messages.partial_updates import send_and_recv as send_and_recv
from jmp_train.graphs.messages.segment import gather as gather
from jmp_train.graphs.messages.segment import segment_max as segment_max
from jmp_train.graphs.messages.segment import segment_mean as segment_mean
from jmp_train.graphs.messages.segment import segment_min as segment_min
from jmp_train.graphs.messages.segment import segment_normalize as segment_normalize
from jmp_train.graphs.messages.segment import segment_softmax as segment_softmax
from jmp_train.graphs.messages.segment import segment_sum as segment_sum
from jmp_train.graphs.messages.user_functions import EdgeBatch as EdgeBatch
from jmp_train.graphs.messages.user_functions import NodeBatch as NodeBatch
