"""Reports: one or two run directories as one HTML file.

run_history   the content of a run directory, read line by line
sessions      the fits of a run on one time axis, without the pauses between them
marks         events with their positions on the axis
comparison    the differences between two runs
charts, svg   curves and events, drawn by matplotlib
page, style   HTML and its style sheet
"""
