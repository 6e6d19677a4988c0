"""XML: element trees, their Lark rules, and the check of finished documents."""
