"""Calls by which a module writes files, as `test_written_files.py` looks for them in the text of every module."""

from __future__ import annotations

import ast

NAMES = {
    *("write_text", "write_bytes", "touch", "unlink", "rmtree", "rename", "link", "symlink", "symlink_to"),
    *("mkstemp", "mkdtemp", "NamedTemporaryFile", "TemporaryFile", "TemporaryDirectory", "FileIO", "save_pretrained"),
    *("copyfile", "copytree", "copy2", "pipe_file", "rmdir", "removedirs", "posix_fallocate", "memfd_create"),
    *("FileHandler", "RotatingFileHandler"),
}
"""Functions that write, create or remove files, whoever has them."""
OF_OS = {"replace", "remove", "truncate", "ftruncate", "pwrite", "sendfile"}
"""Functions that do so if they are the module `os`'s; other classes have methods of these names."""
FLAGS = {"O_CREAT", "O_TRUNC", "O_RDWR", "O_WRONLY"}


def writes(node: ast.AST) -> bool:
    """Returns whether a node of a module's text is a call that writes, creates or removes a file."""
    if not isinstance(node, ast.Call):
        return False
    function = node.func
    name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
    owner = function.value.id if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) else ""
    if owner == "os" and name == "open":
        return any(isinstance(each, ast.Attribute) and each.attr in FLAGS for each in ast.walk(node))
    if name in ("open", "fdopen"):
        given = [*node.args, *(word.value for word in node.keywords)]
        modes = [set(str(each.value)) for each in given if isinstance(each, ast.Constant)]
        return any(mode <= set("rwaxbt+") and mode & set("wax+") for mode in modes)
    return name in NAMES or (owner == "os" and name in OF_OS)
