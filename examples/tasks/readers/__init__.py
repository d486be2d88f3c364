"""Readers of MNIST's and CIFAR-10's files, and of folders of images."""
