"""The models and losses of the tasks."""

from jmp_train.tasks.models.convolution import Conv as Conv
from jmp_train.tasks.models.convolution import ResNet as ResNet
from jmp_train.tasks.models.convolution import batch_norm as batch_norm
from jmp_train.tasks.models.convolution import torch_uniform as torch_uniform
from jmp_train.tasks.models.gpt import GPT as GPT
from jmp_train.tasks.models.gpt import GPTConfig as GPTConfig
from jmp_train.tasks.models.gpt import generate as generate
from jmp_train.tasks.models.graph_classifiers import WEIGHT_DECAY as WEIGHT_DECAY
from jmp_train.tasks.models.graph_classifiers import adam_with_l2 as adam_with_l2
from jmp_train.tasks.models.graph_classifiers import cross_entropy as cross_entropy
from jmp_train.tasks.models.graph_classifiers import graph_classifier as graph_classifier
from jmp_train.tasks.models.graph_classifiers import node_classifier as node_classifier
from jmp_train.tasks.models.graph_classifiers import node_examples as node_examples
from jmp_train.tasks.models.graph_classifiers import over_devices as over_devices
from jmp_train.tasks.models.graph_models import GAT as GAT
from jmp_train.tasks.models.graph_models import GCN as GCN
from jmp_train.tasks.models.graph_models import GIN as GIN
from jmp_train.tasks.models.graph_models import SAGE as SAGE
from jmp_train.tasks.models.losses import Accuracy as Accuracy
from jmp_train.tasks.models.losses import ImageClassifier as ImageClassifier
from jmp_train.tasks.models.losses import image_classifier as image_classifier
from jmp_train.tasks.models.vision_transformer import VisionTransformer as VisionTransformer
