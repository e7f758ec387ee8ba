"""The port of Gazette's package ``message``, compared with the original."""
