"""Secure operations: one file a rule, predict and certify side by side, the proof in the docstring."""

from patchcure.operations.agreement import Agreement
from patchcure.operations.base import SecureOperation
from patchcure.operations.bounds import IntervalBounds
from patchcure.operations.challenger import Challenger
from patchcure.operations.crosscert import CrossCert
from patchcure.operations.double_masking import DoubleMasking
from patchcure.operations.hicert import HiCert
from patchcure.operations.minority_reports import MinorityReports
from patchcure.operations.scalecert import ScaleCert

OPERATIONS: dict[str, SecureOperation] = {
    "double-masking": DoubleMasking(),
    "double-masking-unmasked": DoubleMasking(reference="unmasked"),
    "agreement": Agreement(),
    "challenger": Challenger(),
    "crosscert": CrossCert(),
    "hicert": HiCert(),
    "interval-bounds": IntervalBounds(),
    "minority-reports": MinorityReports(),
    "scalecert": ScaleCert(),
}
"""Operations by the names that options and command lines use."""

__all__ = [
    "OPERATIONS",
    "Agreement",
    "Challenger",
    "CrossCert",
    "DoubleMasking",
    "HiCert",
    "IntervalBounds",
    "MinorityReports",
    "ScaleCert",
    "SecureOperation",
]
