"""Frameworks' own interfaces, backed by sessions of a server. Each module but `chats` and `conversation` needs its
framework, which an extra of the same name installs."""
