"""vLLM's connector. Name it on the command line:

--kv-transfer-config '{"kv_connector": "ForebayConnector",
                       "kv_connector_module_path": "forebay.vllm", "kv_role": "kv_both",
                       "kv_load_failure_policy": "recompute"}'
"""

from forebay.vllm.connector import ForebayConnector

__all__ = ["ForebayConnector"]
