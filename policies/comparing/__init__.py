"""Compares the log-probabilities of two functions, and finds the operations where they diverge."""

from jmp_train.policies.comparing.comparison import parity as parity
from jmp_train.policies.comparing.log_probs import TokenDifference as TokenDifference
from jmp_train.policies.comparing.parted import FirstDifference as FirstDifference
from jmp_train.policies.comparing.parted import OperationParity as OperationParity
from jmp_train.policies.comparing.report import ParityReport as ParityReport
