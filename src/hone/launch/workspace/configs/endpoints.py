"""Named servers for `vf-eval -m NAME` and `hone eval run ENV -m NAME`.

The entry "default" is used for names without an entry.
"""

import os

ENDPOINTS = {
    "default": {
        "base_url": "http://localhost:8000/v1",  # `inference --model.name MODEL` on this machine
        "api_key": os.getenv("HONE_API_KEY"),
    },
    # "judge": {"model": "MODEL", "base_url": "https://HOST/v1", "api_key": os.getenv("JUDGE_API_KEY")},
}
