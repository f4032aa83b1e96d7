"""Serves SkyRL's Tinker API on 127.0.0.1:PORT: `serve.py PORT [options of SkyRL's server]`.

SkyRL starts its engine with `uv run`, which would install another environment. This starts the engine with the
interpreter that runs this file.
"""

import argparse
import sys

import skyrl.tinker.api as api
import uvicorn
from skyrl.tinker.config import EngineConfig, add_model, config_to_argv


def engine_command(_parent, config):
    return [sys.executable, "-m", "skyrl.tinker.engine", *config_to_argv(config)]


parser = argparse.ArgumentParser()
parser.add_argument("port", type=int)
add_model(parser, EngineConfig)
options = vars(parser.parse_args())
port = options.pop("port")
api._build_uv_run_cmd_engine = engine_command
api.app.state.engine_config = EngineConfig.model_validate(options)
uvicorn.run(api.app, host="127.0.0.1", port=port, log_level="info")
