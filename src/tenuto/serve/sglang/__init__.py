"""The SGLang-compatible interface: paths, requests and answers in SGLang's form."""
