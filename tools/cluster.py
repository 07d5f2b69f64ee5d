"""`megamem cluster check`: what a cluster's profile names and this machine does not have."""

from __future__ import annotations

import argparse
from typing import Any

from pretrain.errors import ConfigError
from slurm.cluster_check import check_cluster
from slurm.profile import ClusterConfig, find_profile, load_profile
from tools.common.parsers import add_command

_EPILOG = """\
examples:
  megamem cluster check local
  megamem cluster check configs/clusters/example-h100.yaml
  megamem cluster keys

Looks for commands, folders, partition and image, and asks Slurm whether it would take a job of the profile. Nothing is
queued. `megamem cluster keys` lists what a profile may hold.
"""


def add_parser(subparsers: Any) -> None:
    """Adds `cluster` to the commands of `megamem`."""
    parser = add_command(subparsers, "cluster", "look at a cluster's profile", _EPILOG)
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    checking = actions.add_parser("check", help="find what the profile names and this machine lacks")
    checking.add_argument("profile", metavar="PROFILE", help="one of configs/clusters by name, or a YAML file")
    checking.set_defaults(func=run_check)
    keys = actions.add_parser("keys", help="every key of a profile, with help")
    keys.set_defaults(func=run_keys)


def run_check(args: argparse.Namespace) -> int:
    """Prints every finding.

    Raises:
        ConfigError: something is missing.
    """
    findings = check_cluster(load_profile(find_profile(args.profile)))
    for finding in findings:
        print(f"{finding.what}: {finding.problem or 'there'}")
    missing = [finding for finding in findings if finding.problem]
    if missing:
        raise ConfigError(f"{len(missing)} of {len(findings)} things that the profile {args.profile} needs are missing")
    return 0


def run_keys(args: argparse.Namespace) -> int:
    """Prints every key with its type and help."""
    from tools.config.describe import describe_fields

    for field in describe_fields(ClusterConfig):
        print(f"{field.key} ({field.type}): {' '.join(field.doc.split())}")
    return 0
