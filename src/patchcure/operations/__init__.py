"""Secure operations: one file a rule, predict and certify side by side, the proof in the docstring."""

from patchcure.operations.agreement import Agreement
from patchcure.operations.base import SecureOperation
from patchcure.operations.bounds import IntervalBounds
from patchcure.operations.challenger import Challenger
from patchcure.operations.clipped_mean import ClippedMean
from patchcure.operations.crosscert import CrossCert
from patchcure.operations.double_masking import DoubleMasking
from patchcure.operations.hicert import HiCert
from patchcure.operations.local_detection import LocalDetection
from patchcure.operations.minority_reports import MinorityReports
from patchcure.operations.region_votes import RegionVotes
from patchcure.operations.robust_masking import RobustMasking
from patchcure.operations.scalecert import ScaleCert
from patchcure.operations.voting import Voting

OPERATIONS: dict[str, SecureOperation] = {
    "double-masking": DoubleMasking(),
    "double-masking-unmasked": DoubleMasking(reference="unmasked"),
    "agreement": Agreement(),
    "challenger": Challenger(),
    "clipped-mean": ClippedMean(),
    "crosscert": CrossCert(),
    "hicert": HiCert(),
    "interval-bounds": IntervalBounds(),
    "local-detection": LocalDetection(),
    "minority-reports": MinorityReports(),
    "region-votes": RegionVotes(),
    "robust-masking": RobustMasking(),
    "scalecert": ScaleCert(),
    "voting": Voting(),
}
"""Operations by the names that options and command lines use."""

__all__ = [
    "OPERATIONS",
    "Agreement",
    "Challenger",
    "ClippedMean",
    "CrossCert",
    "DoubleMasking",
    "HiCert",
    "IntervalBounds",
    "LocalDetection",
    "MinorityReports",
    "RegionVotes",
    "RobustMasking",
    "ScaleCert",
    "SecureOperation",
    "Voting",
]
