"""Reports: one or two run directories as one HTML file.

run_history  what a run directory holds, read line by line
sessions     the fits of a run on one time axis, without the pauses between them
comparison   what differs between two runs
charts, svg  curves and events, drawn by matplotlib
tables, page HTML
"""
