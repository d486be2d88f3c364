"""Message passing under DGL's names, and sums over segments."""

from jmp_train.graphs.messages.edge_messages import Edge as Edge
from jmp_train.graphs.messages.edge_messages import PerEdge as PerEdge
from jmp_train.graphs.messages.frames import Frame as Frame
from jmp_train.graphs.messages.frames import checked_ids as checked_ids
from jmp_train.graphs.messages.frames import frame_of as frame_of
from jmp_train.graphs.messages.frames import some_edges as some_edges
from jmp_train.graphs.messages.message_passing import update_all as update_all
from jmp_train.graphs.messages.send_receive import receive as receive
from jmp_train.graphs.messages.user_functions import EdgeBatch as EdgeBatch
from jmp_train.graphs.messages.user_functions import NodeBatch as NodeBatch
