"""Batches for training loops, and readers of public data files."""

from jmp_train.data.array_loading import array_batches as array_batches
from jmp_train.data.array_loading import check_seed as check_seed
from jmp_train.data.graph_batching import graph_batches as graph_batches
from jmp_train.data.graph_loading import neighbor_batches as neighbor_batches
from jmp_train.data.image_files import read_image as read_image
from jmp_train.data.image_folder import center_crops as center_crops
from jmp_train.data.image_folder import random_crops as random_crops
from jmp_train.data.image_folder import read_image_folder as read_image_folder
from jmp_train.data.public_images import CIFAR10_CLASSES as CIFAR10_CLASSES
from jmp_train.data.public_images import CIFAR10_FILES as CIFAR10_FILES
from jmp_train.data.public_images import CIFAR10_SIZE as CIFAR10_SIZE
from jmp_train.data.public_images import MNIST_FILES as MNIST_FILES
from jmp_train.data.public_images import read_cifar10 as read_cifar10
from jmp_train.data.public_images import read_cifar10_batch as read_cifar10_batch
from jmp_train.data.public_images import read_idx as read_idx
from jmp_train.data.public_images import read_mnist as read_mnist
