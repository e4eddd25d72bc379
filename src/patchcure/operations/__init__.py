"""Secure operations: one file a rule, predict and certify side by side, the proof in the docstring."""

from patchcure.operations.base import SecureOperation
from patchcure.operations.challenger import Challenger
from patchcure.operations.clipped_mean import ClippedMean
from patchcure.operations.double_masking import DoubleMasking
from patchcure.operations.local_detection import LocalDetection
from patchcure.operations.minority_reports import MinorityReports
from patchcure.operations.region_votes import RegionVotes
from patchcure.operations.robust_masking import RobustMasking

OPERATIONS: dict[str, SecureOperation] = {
    "double-masking": DoubleMasking(),
    "double-masking-unmasked": DoubleMasking(reference="unmasked"),
    "challenger": Challenger(),
    "clipped-mean": ClippedMean(),
    "local-detection": LocalDetection(),
    "minority-reports": MinorityReports(),
    "region-votes": RegionVotes(),
    "robust-masking": RobustMasking(),
}
"""Operations by the names that options and command lines use."""

__all__ = [
    "OPERATIONS",
    "Challenger",
    "ClippedMean",
    "DoubleMasking",
    "LocalDetection",
    "MinorityReports",
    "RegionVotes",
    "RobustMasking",
    "SecureOperation",
]
