"""Floor 2: message passing on graphs in half precision. So far it has the operations on segments."""

from jmp_train.graphs.segment import gather as gather
from jmp_train.graphs.segment import segment_max as segment_max
from jmp_train.graphs.segment import segment_mean as segment_mean
from jmp_train.graphs.segment import segment_min as segment_min
from jmp_train.graphs.segment import segment_normalize as segment_normalize
from jmp_train.graphs.segment import segment_softmax as segment_softmax
from jmp_train.graphs.segment import segment_sum as segment_sum
