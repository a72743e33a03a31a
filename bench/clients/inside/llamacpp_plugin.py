"""A plugin of pytest with which the tests of llama.cpp's server talk to the server at `TENUTO_URL`.

They can use a server that runs already, which they find by the variables `DEBUG_EXTERNAL` and `PORT`. Then they ignore
the options with which they would start one. Packages with which they fetch models are stand-ins.
"""

import os

from stand_ins import stand_in  # type: ignore[import-not-found]  # in this directory

os.environ |= {"DEBUG_EXTERNAL": "1", "PORT": os.environ["TENUTO_URL"].rsplit(":", 1)[1]}
stand_in("filelock", "wget")
pytest_plugins = ["outcomes"]
