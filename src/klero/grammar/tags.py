def lark_of_tags(tag, rule): return ""
