"""Operations on whole graphs: readouts of a batch's graphs, pooling, and norms over real nodes."""

from jmp_train.graphs.readout.graph_features import Part as Part
from jmp_train.graphs.readout.graph_features import rows_of as rows_of
