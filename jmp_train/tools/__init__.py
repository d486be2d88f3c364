"""Tools that examine functions and training steps: `diagnose`, `parity`, and their reports."""

from jmp_train.tools.checking_parity.log_probs import TokenDifference as TokenDifference
from jmp_train.tools.checking_parity.parity import parity as parity
from jmp_train.tools.checking_parity.parity_report import FirstDifference as FirstDifference
from jmp_train.tools.checking_parity.parity_report import OperationParity as OperationParity
from jmp_train.tools.checking_parity.parity_report import ParityReport as ParityReport
from jmp_train.tools.diagnosing.diagnosis import diagnose as diagnose
from jmp_train.tools.diagnosing.numerics_report import NumericsReport as NumericsReport
from jmp_train.tools.diagnosing.operation_numerics import OperationNumerics as OperationNumerics
from jmp_train.tools.diagnosing.problems import Problem as Problem
from jmp_train.tools.diagnosing.remedies import Remedy as Remedy
