"""Environments: tasks with a reward. The names and signatures of verifiers' v0 protocol.

import hone.environments as vf
vf.SingleTurnEnv(dataset=…, system_prompt=…, parser=vf.XMLParser(["answer"]), rubric=vf.Rubric(funcs=[…]))
"""

from hone.environments.environment import Environment, SingleTurnEnv
from hone.environments.parsers import Parser, XMLParser
from hone.environments.registry import load_environment, load_environments
from hone.environments.rubric import Rubric

__all__ = ["Environment", "Parser", "Rubric", "SingleTurnEnv", "XMLParser", "load_environment", "load_environments"]
