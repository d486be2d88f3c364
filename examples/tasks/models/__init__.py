"""The models and losses of the jobs."""

from .causal_attention import causal_attention as causal_attention
from .convolution import Conv as Conv
from .convolution import ResNet as ResNet
from .convolution import batch_norm as batch_norm
from .convolution import torch_uniform as torch_uniform
from .gpt import GPT as GPT
from .gpt import GPTConfig as GPTConfig
from .gpt import empty_cache as empty_cache
from .gpt import generate as generate
from .graph_classifiers import WEIGHT_DECAY as WEIGHT_DECAY
from .graph_classifiers import adam_with_l2 as adam_with_l2
from .graph_classifiers import cross_entropy as cross_entropy
from .graph_classifiers import graph_classifier as graph_classifier
from .graph_classifiers import node_classifier as node_classifier
from .graph_classifiers import node_examples as node_examples
from .graph_classifiers import over_devices as over_devices
from .graph_models import GAT as GAT
from .graph_models import GCN as GCN
from .graph_models import GIN as GIN
from .graph_models import SAGE as SAGE
from .losses import Accuracy as Accuracy
from .losses import ImageClassifier as ImageClassifier
from .losses import image_classifier as image_classifier
from .vision_transformer import VisionTransformer as VisionTransformer
