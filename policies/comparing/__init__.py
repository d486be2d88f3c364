"""Two functions beside each other: how far their log-probabilities are apart, and the operation from which on."""

from jmp_train.policies.comparing.comparison import parity as parity
from jmp_train.policies.comparing.differences import TokenDifference as TokenDifference
from jmp_train.policies.comparing.parted import FirstDifference as FirstDifference
from jmp_train.policies.comparing.parted import OperationParity as OperationParity
from jmp_train.policies.comparing.report import ParityReport as ParityReport
