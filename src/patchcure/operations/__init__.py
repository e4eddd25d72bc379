"""Secure operations: one file a rule, predict and certify side by side, the proof in the docstring."""

from patchcure.operations.base import SecureOperation
from patchcure.operations.challenger import Challenger
from patchcure.operations.double_masking import DoubleMasking
from patchcure.operations.minority_reports import MinorityReports
from patchcure.operations.voting import Voting

OPERATIONS: dict[str, SecureOperation] = {
    "double-masking": DoubleMasking(),
    "double-masking-unmasked": DoubleMasking(reference="unmasked"),
    "challenger": Challenger(),
    "minority-reports": MinorityReports(),
    "voting": Voting(),
}
"""Operations by the names that options and command lines use."""

__all__ = ["OPERATIONS", "Challenger", "DoubleMasking", "MinorityReports", "SecureOperation", "Voting"]
