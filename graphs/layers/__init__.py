"""Layers of graph networks, and attention over edges."""

from jmp_train.graphs.layers.appnp import APPNPConv as APPNPConv
from jmp_train.graphs.layers.appnp import appnp_conv as appnp_conv
from jmp_train.graphs.layers.attention import edge_softmax as edge_softmax
from jmp_train.graphs.layers.attention import gat_attention as gat_attention
from jmp_train.graphs.layers.attention import gatv2_attention as gatv2_attention
from jmp_train.graphs.layers.cheb import ChebConv as ChebConv
from jmp_train.graphs.layers.cheb import cheb_conv as cheb_conv
from jmp_train.graphs.layers.gat import GATConv as GATConv
from jmp_train.graphs.layers.gat import gat_conv as gat_conv
from jmp_train.graphs.layers.gatv2 import GATv2Conv as GATv2Conv
from jmp_train.graphs.layers.gatv2 import gatv2_conv as gatv2_conv
from jmp_train.graphs.layers.gcn import GraphConv as GraphConv
from jmp_train.graphs.layers.gcn import graph_conv as graph_conv
from jmp_train.graphs.layers.gin import GINConv as GINConv
from jmp_train.graphs.layers.gin import gin_conv as gin_conv
from jmp_train.graphs.layers.propagation import propagate as propagate
from jmp_train.graphs.layers.sage import SAGEConv as SAGEConv
from jmp_train.graphs.layers.sage import sage_conv as sage_conv
from jmp_train.graphs.layers.sgc import SGConv as SGConv
from jmp_train.graphs.layers.sgc import sg_conv as sg_conv
from jmp_train.graphs.layers.tag import TAGConv as TAGConv
from jmp_train.graphs.layers.tag import tag_conv as tag_conv
