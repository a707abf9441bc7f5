import pathlib
RESULTS = pathlib.Path(__file__).with_name("results.json")
def write_tables(results): pass
